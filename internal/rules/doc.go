// Package rules has tests of properties of the whole tree: which packages may import which, that the host knows no
// schema, that every package has a description, and that documents name existing things. It has no code.
package rules
