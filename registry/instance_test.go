package registry

import "testing"

// InTask returns the path by which a later instance of the plugin knows a mount of an earlier one.
func TestPathsAreThoseOfTheInstance(t *testing.T) {
	recorded := Tree{Host: "/mnt/p/stage/x", Task: "/csi/stage/x"}
	for _, c := range []struct {
		root Tree
		want string
	}{
		{Tree{Host: "/mnt/p", Task: "/csi"}, "/csi/stage/x"},
		{Tree{Host: "/mnt/p", Task: "/local/csi"}, "/local/csi/stage/x"},
		{Tree{Host: "/mnt/other", Task: "/local/csi"}, "/csi/stage/x"},
		{Tree{Host: "/mnt/p"}, "/csi/stage/x"},
	} {
		if got := c.root.InTask(recorded); got != c.want {
			t.Errorf("%+v: %s, want %s", c.root, got, c.want)
		}
	}
}
