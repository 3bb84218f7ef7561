"""One kernel a package, named by its result; the scans share one.  They import the DSL: import them
only through the host functions.
"""
