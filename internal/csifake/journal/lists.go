package journal

import (
	"path/filepath"
	"strings"
)

// lists is R29.
func (c *checker) lists(l Line) {
	switch l.RPC {
	case "ListVolumes", "ListSnapshots", "ControllerListVolumeHealth":
	default:
		return
	}
	if l.Token != "" && !c.tokens[listKey{l.Plugin, l.RPC, l.Token}] {
		c.report("R29", "%s goes on with the token %q, which the plugin has not given", l.RPC, l.Token)
	}
	list := listKey{of: l.Instance, rpc: l.RPC}
	if l.Token == "" {
		c.pages[list] = 0
	}
	if c.pages[list]++; c.opts.MaxPages > 0 && c.pages[list] > c.opts.MaxPages {
		c.report("R29", "%s asks for page %d of a list", l.RPC, c.pages[list])
	}
}

// probed is R27.
func (c *checker) probed(l Line) {
	const minute = 60_000_000_000 // nanoseconds
	most := c.opts.ProbesPerMinute
	if l.RPC != "Probe" || most <= 0 {
		return
	}
	newest := append(c.probes[l.Run], l.Mono)
	if len(newest) > most {
		if first := newest[len(newest)-1-most]; l.Mono-first < minute {
			c.report("R27", "the probe before the last %d was less than a minute ago", most)
		}
		newest = newest[len(newest)-most:]
	}
	c.probes[l.Run] = newest
}

// endpoint is R31.
func (c *checker) endpoint(l Line) {
	path, unix := strings.CutPrefix(l.Endpoint, "unix://")
	if l.Endpoint != "" && (!unix || !filepath.IsAbs(path) || !strings.HasSuffix(path, ".sock")) {
		c.report("R31", "%s was started with CSI_ENDPOINT=%q", l.Instance, l.Endpoint)
	}
}
