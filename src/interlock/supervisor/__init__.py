"""The supervisor: takes calls over REST, and keeps the processes of workers in the state that their rows ask for."""
