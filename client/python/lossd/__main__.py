"""`python -m lossd`: the server."""

from lossd.commands import lossd

if __name__ == "__main__":
    lossd()
