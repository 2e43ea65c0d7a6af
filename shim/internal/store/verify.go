package store

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"holdfast/registry"
)

// content is what a verified file says of itself.
type content struct {
	entries map[string]json.RawMessage // of the meta bucket
	tallies map[string]tally           // as counted
	buckets map[string]bool
}

// verify reads a whole file that nobody writes: its pages, each checksum, and that no record is missing. It neither maps nor
// changes it. An error is the description of the first damage that was found.
func verify(file io.ReaderAt, size int64) (c content, err error) {
	c = content{entries: map[string]json.RawMessage{}, tallies: map[string]tally{}}
	defer func() {
		if r := recover(); r != nil { // a hole in the walker's checks must not end the process
			err = fmt.Errorf("%v", r)
		}
	}()
	walker, err := newPages(file, size)
	if err != nil {
		return c, err
	}
	if err := walker.walk(c.add); err != nil {
		return c, err
	}
	c.buckets = walker.buckets
	return c, c.complete()
}

// verifyMeta checks that the file is not cut off, checks the pages that bbolt follows when it opens the file, and returns
// the content of the meta bucket. It reads nothing else.
func verifyMeta(file io.ReaderAt, size int64) (s state, err error) {
	c := content{entries: map[string]json.RawMessage{}}
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%v", r)
		}
	}()
	walker, err := newPages(file, size)
	if err != nil {
		return s, err
	}
	if err := walker.walkBucket(bucketMeta, c.add); err != nil {
		return s, err
	}
	return c.state()
}

func (c content) add(bucket string, key, value []byte) error {
	text, err := unseal(bucket, key, value)
	if err != nil {
		return err
	}
	if bucket == bucketMeta {
		c.entries[string(key)] = append(json.RawMessage{}, text...)
		return nil
	}
	sum := c.tallies[bucket]
	sum.add(value)
	c.tallies[bucket] = sum
	return nil
}

// complete compares what was counted with the tallies that were stored, in both directions.
func (c content) complete() error {
	var app string
	if err := c.entry(metaApplication, &app); err != nil {
		return err
	}
	if app != application {
		return fmt.Errorf("it is the file of %q, not of %s", app, application)
	}
	for name := range c.entries {
		bucket, isTally := strings.CutPrefix(name, metaTally)
		if !isTally {
			continue
		}
		var want tally
		if err := c.entry(name, &want); err != nil {
			return err
		}
		if !c.buckets[bucket] {
			return fmt.Errorf("bucket %s is missing", bucket)
		}
		if got := c.tallies[bucket]; got != want {
			return fmt.Errorf("bucket %s has %d records, of which the sum is wrong, instead of %d", bucket, got.Records, want.Records)
		}
	}
	for bucket := range c.buckets {
		if _, ok := c.entries[metaTally+bucket]; !ok && bucket != bucketMeta {
			return fmt.Errorf("bucket %s has no tally", bucket)
		}
	}
	return nil
}

func (c content) entry(name string, into any) error {
	text, ok := c.entries[name]
	if !ok {
		return fmt.Errorf("meta entry %s is missing", name)
	}
	if err := json.Unmarshal(text, into); err != nil {
		return fmt.Errorf("meta entry %s: %w", name, err)
	}
	return nil
}

// state is the part of the meta bucket that Open decides by.
type state struct {
	window     window
	generation registry.Generation
	boot       string
	seq        registry.Seq
}

func (c content) state() (s state, err error) {
	for name, into := range map[string]any{
		metaSchema: &s.window, metaGeneration: &s.generation, metaBoot: &s.boot, metaSeq: &s.seq, metaFloor: new(registry.Seq),
	} {
		if err := c.entry(name, into); err != nil {
			return s, err
		}
	}
	return s, nil
}
