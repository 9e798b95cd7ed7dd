"""Updates, defined to the last bit: edits, schema, validation, guard, trial, file format. No threads."""
