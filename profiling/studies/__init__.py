"""Studies that make several runs or longer measurements."""
