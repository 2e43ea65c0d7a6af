package rpc

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/protobuf/proto"

	"holdfast/internal/durable"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
)

// Literals keeps the literal secrets of volumes in files, one file per secret. It removes files that no record refers
// to. A file is written before the record that refers to it.
type Literals struct {
	dir    string // has mode 0700; made with the first secret
	state  registry.State
	logger hclog.Logger
	wake   chan struct{} // holds one token after records with secrets may have been removed

	mu    sync.Mutex     // guards the directory and inUse
	inUse map[string]int // files of specs that are being recorded, with the number of uses
}

// NewLiterals returns the Literals whose files are in dir. Run removes unused files.
func NewLiterals(dir string, state registry.State, logger hclog.Logger) *Literals {
	return &Literals{dir: dir, state: state, logger: logger, wake: make(chan struct{}, 1), inUse: map[string]int{}}
}

// keyFile holds the random key from which file names are made. A name depends on the secret's value, so the same spec
// has the same references. Without the key, a name reveals nothing about the value.
const keyFile = "key"

// moveToFiles replaces the literal secrets of the spec by references to files. The files stay at least until the caller
// calls release, after it has recorded the spec. If the spec is not recorded, Run removes them.
func (l *Literals) moveToFiles(spec registry.VolumeSpec) (moved registry.VolumeSpec, release func(), err error) {
	secrets := maps.Clone(spec.Secrets)
	maps.DeleteFunc(secrets, func(_ string, s registry.Secret) bool { return s.Literal == "" })
	if len(secrets) == 0 {
		return spec, func() {}, nil
	}
	refs, err := l.store(spec.VolumeName(), secrets)
	if err != nil {
		l.release(refs)
		return spec, nil, fmt.Errorf("keep the secrets of volume %s: %w", spec.VolumeName(), err)
	}
	spec.Secrets = maps.Clone(spec.Secrets)
	maps.Copy(spec.Secrets, refs)
	return spec, func() { l.release(refs) }, nil
}

// hashSecrets returns the request with hashes in place of its literal secrets, made with the key of the file names. A
// digest of this request can be stored without revealing the secrets. A request without literal secrets is returned
// unchanged.
func (l *Literals) hashSecrets(req request) (request, error) {
	create, is := req.(interface{ GetSpec() *pb.VolumeSpec })
	if !is {
		return req, nil
	}
	literal := func(s *pb.Secret) bool { return s.GetLiteral() != "" }
	if !slices.ContainsFunc(slices.Collect(maps.Values(create.GetSpec().GetSecrets())), literal) {
		return req, nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	key, err := l.key()
	if err != nil {
		return nil, err
	}
	copied := proto.CloneOf(req)
	for _, s := range copied.(interface{ GetSpec() *pb.VolumeSpec }).GetSpec().GetSecrets() {
		if literal(s) {
			sum := hmac.New(sha256.New, key)
			_, _ = sum.Write([]byte(s.GetLiteral())) // never fails
			s.Literal = hex.EncodeToString(sum.Sum(nil))
		}
	}
	return copied, nil
}

// store writes the secrets to files, and returns references to them. The files stay at least until release is
// called, also after an error.
func (l *Literals) store(name registry.VolumeName, secrets map[string]registry.Secret) (
	refs map[string]registry.Secret, err error,
) {
	l.mu.Lock()
	defer l.mu.Unlock()
	key, err := l.key()
	if err != nil {
		return nil, err
	}
	refs = map[string]registry.Secret{}
	for k, s := range secrets {
		if len(s.Literal) > maxSecret {
			return refs, registry.Invalid("secret %q has %d bytes; at most %d are allowed", k, len(s.Literal),
				maxSecret)
		}
		sum := hmac.New(sha256.New, key)
		fmt.Fprintf(sum, "%q %q %q %q", name.Namespace, name.ID, k, s.Literal.Reveal())
		file := filepath.Join(l.dir, hex.EncodeToString(sum.Sum(nil)[:16]))
		refs[k] = registry.Secret{File: file}
		l.inUse[file]++
		// the reader of the file removes one line end
		if err := l.write(file, []byte(s.Literal.Reveal()+"\n")); err != nil {
			return refs, err
		}
	}
	return refs, nil
}

// key returns the key of the file names. If there is none, it makes one.
func (l *Literals) key() ([]byte, error) {
	path := filepath.Join(l.dir, keyFile)
	key, err := os.ReadFile(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return key, err
	}
	if err := os.MkdirAll(l.dir, 0o700); err != nil {
		return nil, err
	}
	key = make([]byte, sha256.Size)
	_, _ = rand.Read(key) // never fails
	return key, l.write(path, key)
}

// write writes a file durably, unless it exists.
func (l *Literals) write(path string, text []byte) error {
	if _, err := os.Lstat(path); err == nil {
		return nil
	}
	return durable.WriteFile(path, text)
}

// release ends the use of the files that store has returned. Run may then remove them.
func (l *Literals) release(refs map[string]registry.Secret) {
	l.mu.Lock()
	for _, s := range refs {
		if l.inUse[s.File]--; l.inUse[s.File] == 0 {
			delete(l.inUse, s.File)
		}
	}
	l.mu.Unlock()
	l.wakeRun()
}

// Applied makes Run look for unused files if records with secrets have changed.
func (l *Literals) Applied(a registry.Applied) {
	if a.Change.Touches(registry.BucketVolumes, registry.BucketSnapshots, registry.BucketGroupSnapshots) {
		l.wakeRun()
	}
}

func (l *Literals) wakeRun() {
	select {
	case l.wake <- struct{}{}:
	default: // Run has yet to take the pending token
	}
}

// Run removes unused files until ctx ends. It begins with those that an earlier process has left.
func (l *Literals) Run(ctx context.Context) error {
	for {
		if err := l.sweep(ctx); err != nil && ctx.Err() == nil {
			l.logger.Warn("cannot remove unused secrets", "error", err)
		}
		select {
		case <-l.wake:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// sweep removes the files that no record refers to.
func (l *Literals) sweep(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	files, err := os.ReadDir(l.dir)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(files) < 2 { // at most the key
		return nil
	}
	used := map[string]bool{filepath.Join(l.dir, keyFile): true}
	if err == nil {
		err = l.state.View(ctx, func(v registry.View) error {
			for _, vol := range v.Volumes() {
				for _, s := range vol.Secrets {
					used[s.File] = true
				}
			}
			for _, snap := range v.SnapshotRecords() {
				for _, s := range snap.Secrets {
					used[s.File] = true
				}
			}
			return nil
		})
	}
	if err != nil {
		return err
	}
	for _, f := range files {
		if ctx.Err() != nil { // the next shim may already use such a file again
			return ctx.Err()
		}
		if path := filepath.Join(l.dir, f.Name()); !used[path] && l.inUse[path] == 0 {
			err = errors.Join(err, os.Remove(path))
		}
	}
	return err
}
