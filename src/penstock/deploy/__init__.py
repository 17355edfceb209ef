"""Takes Penstock to others' machines: writes files, which the user then owns, for Modal."""
