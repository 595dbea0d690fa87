"""What a server process needs on a machine without a GPU: this folder goes on its PYTHONPATH, Python imports ``sitecustomize``."""
