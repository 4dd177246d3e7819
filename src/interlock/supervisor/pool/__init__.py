"""The supervised worker processes: started, adopted, drained and replaced as their rows demand."""
