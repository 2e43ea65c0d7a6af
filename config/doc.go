// Package config parses HCL job and volume files into specifications or diagnostics.
//
// ParseJob reads a job file (Nomad's job > group > task, a task directly in a job, or a bare task) and ParseVolume a
// volume file. What concerns CSI becomes words of packages registry and hooks; of a job it travels sealed (OpenTask,
// OpenGroup), so that a host stores it without knowing it. Everything else of a job is carried as JSON. Variables,
// locals and a fixed list of pure functions are evaluated here; references that only the run time knows, such as
// ${NOMAD_ALLOC_ID}, stay in what is carried as they are written, and are refused in what is ours.
//
// The same text with the same Options gives the same answer: nothing here reads a clock, an environment or, except
// through Options.ReadFile, a file. Text is not trusted: its size, tokens and nesting are counted before it is parsed,
// and the work of its expressions is bounded. All mistakes are reported at once, at most 20, in the order of the text;
// the text of secrets is never part of a diagnostic.
//
// The package logs nothing and keeps no state. Any goroutine may call it.
package config
