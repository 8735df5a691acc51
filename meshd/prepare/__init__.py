"""The preparation pool: bodies go in through shared memory, routing views come out."""
