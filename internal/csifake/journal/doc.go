// Package journal records the calls that a CSI plugin got, and checks that record.
//
// A journal is a file of JSON lines. Every line is one append, so that several plugins, in one process or in many, may
// write the same file, and so that what was written is still there after a kill. A call is two lines, begin and end;
// one that was cut by a kill has no end. Begin is written before the plugin does anything for the call, end before the
// answer leaves the plugin. So when a client sends B after it has seen the answer of A, the end of A stands above the
// begin of B: the order of the lines is an order that the client can be held to.
//
// Check compares the journal with the CSI automaton and returns which line breaks which rule (Rules). The documentation
// of package csifake, the fake plugin that writes journals, has the automaton as a drawing.
//
// No secret is ever in a journal: a request is there as a hash without its secret fields, both contexts as hashes.
// This package imports the standard library and x/sys only.
package journal
