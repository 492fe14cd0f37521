"""`python -m training`. The rendering workers import this module again: it stays light."""

if __name__ == "__main__":
    from training.run import main

    main()
