"""How far the processes of a save are: told while it is late, and kept with what they wrote."""
