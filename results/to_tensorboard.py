"""Write the records of runs for TensorBoard.

Try: python results/to_tensorboard.py --help
"""

from trainkit.commands.to_tensorboard import main

if __name__ == "__main__":
    main()
