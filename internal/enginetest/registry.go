package enginetest

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"path"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"holdfast/internal/installed"
)

// Registry is an image registry on 127.0.0.1, which engines use without TLS. It serves the image box, a busybox, to one
// user: the pull half of the distribution specification, with basic authentication.
type Registry struct {
	Host           string // as in 127.0.0.1:5000
	User, Password string
	Pulls          atomic.Int64 // requests for the layer of the image

	manifest []byte
	blobs    map[string][]byte // by digest
	layer    string            // digest of the image's layer
	release  context.Context
	Release  func() // lets pulls end
}

const manifestType = "application/vnd.docker.distribution.manifest.v2+json"

// NewRegistry starts a registry. It sends the first half of the image's layer slowly, and the rest only after Release.
func NewRegistry(t testing.TB) *Registry {
	t.Helper()
	installed.Tool(t, "busybox", "busybox-static")
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Fatal(err)
	}
	archive, err := tarOf(busybox, nil)
	if err != nil {
		t.Fatal(err)
	}
	r := &Registry{User: "puller", Password: rand.Text(), blobs: map[string][]byte{}}
	r.release, r.Release = context.WithCancel(context.Background())
	var layer bytes.Buffer
	zip, _ := gzip.NewWriterLevel(&layer, gzip.NoCompression) // so that the slow half takes long enough
	_, _ = zip.Write(archive)
	_ = zip.Close()
	config := r.add(toJSON(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux", "config": map[string]any{"Env": []string{"PATH=/bin"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{digest(archive)}},
	}), "application/vnd.docker.container.image.v1+json")
	content := r.add(layer.Bytes(), "application/vnd.docker.image.rootfs.diff.tar.gzip")
	r.layer = digest(layer.Bytes())
	r.manifest = toJSON(map[string]any{
		"schemaVersion": 2, "mediaType": manifestType, "config": config, "layers": []any{content},
	})
	s := httptest.NewServer(r)
	t.Cleanup(func() {
		r.Release()
		s.Close()
	})
	r.Host = strings.TrimPrefix(s.URL, "http://")
	return r
}

func toJSON(v any) []byte {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // maps of texts cannot fail
	}
	return text
}

func digest(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }

// add stores a blob and returns its descriptor.
func (r *Registry) add(blob []byte, mediaType string) map[string]any {
	r.blobs[digest(blob)] = blob
	return map[string]any{"mediaType": mediaType, "size": len(blob), "digest": digest(blob)}
}

func (r *Registry) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	if user, password, _ := q.BasicAuth(); user != r.User || password != r.Password {
		w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
		refuse(w, http.StatusUnauthorized, "UNAUTHORIZED", "authentication required")
		return
	}
	last := path.Base(q.URL.Path)
	blob, isBlob := r.blobs[last]
	switch {
	case q.URL.Path == "/v2/":
		_, _ = io.WriteString(w, "{}")
	case q.URL.Path == "/v2/box/manifests/latest", q.URL.Path == "/v2/box/manifests/"+digest(r.manifest):
		w.Header().Set("Content-Type", manifestType)
		w.Header().Set("Docker-Content-Digest", digest(r.manifest))
		http.ServeContent(w, q, "", time.Time{}, bytes.NewReader(r.manifest))
	case isBlob && last == r.layer:
		r.Pulls.Add(1)
		w.Header().Set("Content-Type", "application/octet-stream")
		http.ServeContent(w, q, "", time.Time{}, &slowReader{*bytes.NewReader(blob), q.Context(), r.release})
	case isBlob:
		http.ServeContent(w, q, "", time.Time{}, bytes.NewReader(blob))
	default:
		refuse(w, http.StatusNotFound, "MANIFEST_UNKNOWN", "manifest unknown")
	}
}

func refuse(w http.ResponseWriter, status int, code, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(toJSON(map[string]any{"errors": []any{map[string]any{"code": code, "message": message}}}))
}

// slowReader reads half of its content within some 20 s, and the rest after the release.
type slowReader struct {
	bytes.Reader
	ctx     context.Context
	release context.Context
}

func (s *slowReader) Read(p []byte) (int, error) {
	pause := time.After(100 * time.Millisecond)
	if int64(s.Len()) < s.Size()/2 {
		pause = nil
	}
	select {
	case <-pause:
		p = p[:min(int64(len(p)), s.Size()/400)]
	case <-s.release.Done():
	case <-s.ctx.Done():
		return 0, s.ctx.Err()
	}
	return s.Reader.Read(p)
}
