package store

import "holdfast/registry"

// entry is what a derived list has of a record: a key.
type entry struct{ list, key string }

// listed is the text of an entry.
var listed = []byte("{}")

// entriesOf is all that derived lists have of a record.
func entriesOf(record registry.Record) (entries []entry) {
	path := record.Key().Path
	switch r := record.(type) {
	case registry.Volume:
		if r.External != "" { // else its plugin has not named it yet
			entries = append(entries, entry{bucketVolumeKeys, registry.PathOf(r.Plugin, string(r.External)) + path})
		}
		if r.Created {
			entries = append(entries, entry{bucketVolumeNames, string(nameListKey(r.Plugin, r.Name, path))})
		}
	case registry.Operation:
		entries = append(entries, entry{bucketRequestAge, string(numberKey(r.CreateIndex)) + path})
	}
	return entries
}

// nameListKey is that of the volume at a path, which was created under a name. Of a name that is longer than any should be (CSI "Size Limits") it has
// the beginning: who looks it up compares the rest.
func nameListKey(plugin registry.PluginID, name, path string) []byte {
	return []byte(registry.PathOf(plugin, name[:min(len(name), registry.MaxID)]) + path)
}
