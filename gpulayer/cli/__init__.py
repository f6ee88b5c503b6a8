"""The command line. app.py is where it begins; each command is a module that is imported when it is asked for."""
