"""The Python client. `import gpulayer` offers its public names."""
