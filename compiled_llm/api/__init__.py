"""What all rooms use of the public interface: arguments, parameters, outputs, their checks and messages."""
