// Package rules holds the tests of what is true of the whole tree: who may import whom, that the host knows no schema,
// that every package says what it is, and that documents name things that exist. It has no code.
package rules
