"""The SGLang adapter: the only room of the package that imports the host."""
