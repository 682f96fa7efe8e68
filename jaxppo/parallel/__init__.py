"""Meshes, layouts and the platform: where arrays live."""
