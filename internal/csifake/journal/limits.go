package journal

import (
	"fmt"
	"regexp"
	"strings"
)

// limits are R18, R21 and R23: what a field may hold.
func (c *checker) limits(l Line) {
	for _, over := range l.Over {
		c.report("R18", "%s with too long a field: %s", l.RPC, over)
	}
	if strings.ContainsFunc(l.Name, banned) {
		c.report("R21", "%s with control characters in the name %q", l.RPC, l.Name)
	}
	for _, key := range l.SecretKeys {
		if !secretKey.MatchString(key) {
			c.report("R23", "%s with a secret under the key %q", l.RPC, key)
		}
	}
}

var secretKey = regexp.MustCompile(`^[A-Za-z0-9._-]+$`)

// banned are the characters that no name may have.
func banned(r rune) bool {
	return r <= 0x08 || r == 0x0b || r == 0x0c || r >= 0x0e && r <= 0x1f || r >= 0x7f && r <= 0x9f
}

var pluginName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?$`)

// badName is why a name of a plugin breaks the rules, empty if it does not.
func badName(name string) string {
	switch {
	case name == "":
		return "has no name"
	case len(name) > 63:
		return fmt.Sprintf("has a name of %d bytes", len(name))
	case !pluginName.MatchString(name):
		return fmt.Sprintf("has the name %q", name)
	}
	return ""
}

func badNode(id string) string {
	switch {
	case id == "":
		return "has no node id"
	case len(id) > 256:
		return fmt.Sprintf("has a node id of %d bytes", len(id))
	}
	return ""
}

// identity is R20, and R14 for the node: who has told nonsense of itself gets no volumes.
func (c *checker) identity(l Line) {
	k := c.of(l)
	switch l.RPC {
	case "CreateVolume", "ControllerPublishVolume":
	case "NodeStageVolume", "NodePublishVolume":
		if k.badNode != "" {
			c.report("R14", "%s at %s, which %s", l.RPC, l.Instance, k.badNode)
		}
	default:
		return
	}
	if k.badName != "" {
		c.report("R20", "%s at %s, which %s", l.RPC, l.Instance, k.badName)
	}
}
