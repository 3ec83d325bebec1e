"""`specgate report`: what was spent and saved, from the decision log."""
