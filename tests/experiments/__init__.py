"""The what-ifs: one question a file, with what was found; README.md lists them."""
