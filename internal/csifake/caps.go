package csifake

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// AllCaps are all capabilities of CSI 1.13.0 that are about volumes and snapshots, without alpha ones.
var AllCaps = []string{"CREATE_DELETE_VOLUME", "PUBLISH_UNPUBLISH_VOLUME", "STAGE_UNSTAGE_VOLUME", "LIST_VOLUMES",
	"LIST_VOLUMES_PUBLISHED_NODES", "GET_CAPACITY", "CREATE_DELETE_SNAPSHOT", "LIST_SNAPSHOTS", "CLONE_VOLUME",
	"PUBLISH_READONLY", "EXPAND_VOLUME", "MODIFY_VOLUME", "GET_VOLUME_STATS", "VOLUME_MOUNT_GROUP"}

// shortCaps are names that people say.
var shortCaps = map[string]string{"CREATE_DELETE": "CREATE_DELETE_VOLUME",
	"PUBLISH_UNPUBLISH": "PUBLISH_UNPUBLISH_VOLUME",
	"STAGE_UNSTAGE":     "STAGE_UNSTAGE_VOLUME", "TOPOLOGY": "VOLUME_ACCESSIBILITY_CONSTRAINTS"}

// capEnums are the services that have capabilities, and the numbers of their names.
var capEnums = map[string]map[string]int32{
	"service":    csi.PluginCapability_Service_Type_value,
	"expansion":  csi.PluginCapability_VolumeExpansion_Type_value,
	"controller": csi.ControllerServiceCapability_RPC_Type_value,
	"group":      csi.GroupControllerServiceCapability_RPC_Type_value,
	"node":       csi.NodeServiceCapability_RPC_Type_value,
}

// oldCaps are names that CSI had up to version 1.12, by service. Their numbers are reserved since.
var oldCaps = map[string]map[string]int32{"controller": {"VOLUME_CONDITION": 11}, "node": {"VOLUME_CONDITION": 4}}

// capNumber is the number of a name of a service, of today or of earlier.
func capNumber(service, name string) (n int32, known bool) {
	if n, known = capEnums[service][name]; !known {
		n, known = oldCaps[service][name]
	}
	return n, known
}

// capSets are numbers of capabilities by service, in the order given.
type capSets map[string][]int32

// parseCaps reads names of capabilities. A name stands for every service that has it; "node/EXPAND_VOLUME" is that of
// one service. A number is sent as it is, also one that no version of CSI knows: "99", "controller/99". The services
// are service (of the plugin), expansion, controller, group and node. CONTROLLER_SERVICE goes without saying.
func parseCaps(names ...string) (capSets, error) {
	sets := capSets{}
	for _, full := range names {
		service, name, one := strings.Cut(full, "/")
		if !one {
			service, name = "", full
		}
		if long, ok := shortCaps[name]; ok {
			name = long
		}
		if !sets.add(service, name) {
			return nil, fmt.Errorf("csifake: unknown capability %q", full)
		}
	}
	return sets, nil
}

func (s capSets) add(service, name string) bool {
	n, err := strconv.ParseInt(name, 10, 32)
	found := false
	for enum := range capEnums {
		v, known := capNumber(enum, name)
		if err == nil {
			v, known = int32(n), enum != "expansion"
		}
		if !known || service != "" && service != enum {
			continue
		}
		found = true
		if !slices.Contains(s[enum], v) {
			s[enum] = append(s[enum], v)
		}
	}
	return found
}

// has tells whether "service/NAME" is among the sets.
func (s capSets) has(full string) bool {
	service, name, _ := strings.Cut(full, "/")
	n, _ := capNumber(service, name)
	return slices.Contains(s[service], n)
}
