"""One kernel a file, named by its result.  Import these only through the host functions: they import the DSL."""
