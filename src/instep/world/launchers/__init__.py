"""One module per family of launchers, each a pure function from variables to what they say."""
