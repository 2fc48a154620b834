"""The machine below the engine: its cores, memory and hardware, child processes, progress on a terminal."""
