package registry

import (
	"maps"
	"slices"
	"strings"
)

// Topology is a set of segments (CSI Topology.segments). Keys are compared without regard to case, as CSI requires.
type Topology map[string]string

// Accessible reports whether a volume with these topologies (CSI Volume.accessible_topology) is accessible from a node:
// the node has all segments of one of them. A volume without a topology is accessible from every node. A node without
// a topology reaches only such volumes (CSI NodeGetInfoResponse.accessible_topology).
func Accessible(volume []Topology, node Topology) bool {
	return len(volume) == 0 || slices.ContainsFunc(volume, node.has)
}

// Equal reports whether both have the same segments.
func (t Topology) Equal(other Topology) bool { return len(t) == len(other) && t.has(other) }

func (t Topology) has(segments Topology) bool {
	for key, value := range segments {
		if segment, found := t.segment(key); !found || segment != value {
			return false
		}
	}
	return true
}

func (t Topology) segment(key string) (string, bool) {
	if value, found := t[key]; found {
		return value, true
	}
	for k, value := range t {
		if strings.EqualFold(k, key) {
			return value, true
		}
	}
	return "", false
}

// String lists the segments by key, as in "rack=r1, zone=a".
func (t Topology) String() string {
	if len(t) == 0 {
		return "no topology"
	}
	var segments []string
	for _, key := range slices.Sorted(maps.Keys(t)) {
		segments = append(segments, key+"="+t[key])
	}
	return strings.Join(segments, ", ")
}

// Topologies lists alternatives, as in "zone=a or zone=b".
func Topologies(list []Topology) string {
	texts := make([]string, len(list))
	for i, t := range list {
		texts[i] = t.String()
	}
	return strings.Join(texts, " or ")
}
