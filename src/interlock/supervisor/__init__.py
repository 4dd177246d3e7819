"""The supervisor: serves the REST API, and keeps worker processes in the state that their rows ask for."""
