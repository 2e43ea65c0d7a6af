package store

import (
	"encoding/json"
	"fmt"

	"holdfast/registry"
)

// Newest is what the next release writes.
const Newest = 2

// released is the schema of the next release: an instance has a list of endpoints, each with the service that it is
// for. The release before reads and writes `endpoint`, so that goes on being written beside the list.
var released = schema{
	oldest: Oldest, newest: Newest, readable: 1, forms: forms{registry.BucketInstances: listedEndpoint},
	migrations: []migration{intoForm("an instance's endpoint becomes the first of a list", registry.BucketInstances,
		listedEndpoint)},
}

var listedEndpoint = form{write: listEndpoint, read: unlistEndpoint}

// listEndpoint makes the endpoint the first of the list. Other endpoints, and what else is known of the first, stay.
func listEndpoint(record fields) error {
	list, err := endpointsOf(record)
	if err != nil {
		return err
	}
	var old fields
	if err := json.Unmarshal(record["endpoint"], &old); err != nil {
		return fmt.Errorf("endpoint: %w", err)
	}
	if len(list) == 0 {
		list = []fields{{"service": json.RawMessage(`"csi"`)}}
	}
	for name, value := range old {
		list[0][name] = value
	}
	record["endpoints"] = encode(list)
	return nil
}

// unlistEndpoint makes the first of the list the endpoint.
func unlistEndpoint(record fields) error {
	list, err := endpointsOf(record)
	if err != nil || len(list) == 0 {
		return err
	}
	record["endpoint"] = encode(fields{"host": list[0]["host"], "task": list[0]["task"]})
	delete(record, "endpoints")
	return nil
}

func endpointsOf(record fields) (list []fields, err error) {
	if text := record["endpoints"]; text != nil {
		err = json.Unmarshal(text, &list)
	}
	if err != nil {
		return nil, fmt.Errorf("endpoints: %w", err)
	}
	return list, nil
}
