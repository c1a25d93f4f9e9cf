"""The program as one flat dataflow graph: nodes over numbered values, loops included."""
