// Package config parses HCL job and volume files into specifications or diagnostics.
//
// ParseJob reads a job file (Nomad's job > group > task, a task directly in a job, or a bare task) and ParseVolume a
// volume file. The parts that concern CSI become types of packages registry and hooks. In a job these parts are sealed
// (OpenTask, OpenGroup), so that a host stores them without knowing them. Everything else of a job is carried as JSON.
// Variables, locals and a fixed list of pure functions are evaluated here. References that are known at run time only,
// such as ${NOMAD_ALLOC_ID}, stay verbatim in carried parts, and are errors in most parts that concern CSI.
//
// The same text with the same Options gives the same answer: nothing here reads a clock, an environment or, except
// through Options.ReadFile, a file. Text is not trusted: its size, tokens and nesting are counted before it is parsed,
// and the work of its expressions is bounded. All mistakes are reported at once, at most 20, in the order of the text;
// the text of secrets is never part of a diagnostic.
//
// The package logs nothing and keeps no state. Any goroutine may call it.
package config
