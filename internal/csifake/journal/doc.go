// Package journal records the calls that a CSI plugin gets, and checks the record.
//
// A journal is a file of JSON lines. Every line is written with one append. Several plugins, in one or several
// processes, may therefore write to the same file, and written lines survive a kill. A call has two lines, begin and
// end; a call that a kill has cut off has no end. The begin is written before the plugin does anything for the call,
// and the end before the answer leaves the plugin. If a client sends B after it has received the answer of A, the end
// of A therefore precedes the begin of B. The client can be held to this order.
//
// Check compares the journal with the CSI automaton and returns which line breaks which rule (Rules). The documentation
// of package csifake, the fake plugin that writes journals, has the automaton as a drawing.
//
// No secret is ever in a journal. It has a hash of each request without its secret fields, and hashes of both contexts.
// This package imports only the standard library and x/sys.
package journal
