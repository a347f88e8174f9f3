"""`python -m app` is `owl-sap`."""

from app.src.cli import main

if __name__ == "__main__":
    main()
