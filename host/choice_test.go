package host

import (
	"slices"
	"testing"
)

// A binary that was rolled back pushes none out either that had proven itself.
func TestRolledBackBinariesPushNoneOut(t *testing.T) {
	c := &choice{}
	c.ran("a")
	c.ran("b")
	for _, young := range []string{"x", "y", "z"} {
		c.ran(young)
		c.Running, c.Previous = young, "b"
		c.ran("b")
		c.Running, c.Previous = "b", ""
	}
	if !slices.Equal(c.Ran, []string{"b", "a"}) {
		t.Errorf("kept are %v", c.Ran)
	}
}
