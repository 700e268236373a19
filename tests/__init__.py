"""The tests of the retry lab; `python -m unittest` in the folder above runs them all."""
