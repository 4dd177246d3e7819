"""`interlock top`: a live view of the installation in the terminal."""
