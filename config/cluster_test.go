package config

import (
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestParseCluster(t *testing.T) {
	text := `cluster {
		id         = "production"
		expect     = 3
		endpoints  = ["https://10.0.0.1:2379", "https://10.0.0.2:2379"]
		lease_ttl  = "30s"
		lost_nodes = "fence"
		tls {
			ca_file   = "/ca.pem"
			cert_file = "/cert.pem"
			key_file  = "/key.pem"
		}
	}`
	c, diags := ParseCluster(Source{Name: "cluster", Text: []byte(text)}, Options{})
	if err := diags.Err(); err != nil {
		t.Fatal(err)
	}
	want := &Cluster{
		ID: "production", Expect: 3, Endpoints: []string{"https://10.0.0.1:2379", "https://10.0.0.2:2379"},
		CAFile: "/ca.pem", CertFile: "/cert.pem", KeyFile: "/key.pem", LeaseTTL: 30 * time.Second, LostNodes: LostFence,
	}
	if !reflect.DeepEqual(c, want) {
		t.Errorf("%+v, want %+v", c, want)
	}
}

func TestParseClusterErrorsNameTheLine(t *testing.T) {
	const valid = "id = \"c\"\nexpect = 1\nendpoints = [\"http://localhost:2379\"]\n"
	for body, want := range map[string]string{
		"":                                    "id",
		"id = \"c/d\"\nexpect = 1":            "cluster:2:6: ",
		strings.Replace(valid, "1", "0", 1):   "expect",
		valid + "lease_ttl = \"1s\"":          "lease_ttl",
		valid + "lost_nodes = \"forget\"":     "lost_nodes",
		valid + "tls {\ncert_file = \"c\"\n}": "cert_file and key_file belong together",
		valid + "endpoint = []":               "endpoint",
		strings.Replace(valid, "[\"http://localhost:2379\"]", "[]", 1):       "endpoints",
		strings.Replace(valid, "http://localhost:2379", "localhost", 1):      "is not the URL of an etcd server",
		strings.Replace(valid, "http://localhost:2379", "ftp://host:1", 1):   "is not the URL of an etcd server",
		strings.Replace(valid, ":2379", "", 1):                               "is not the URL of an etcd server",
		strings.Replace(valid, "http://", "https://u:secret@", 1):            "has a user or password",
		strings.Replace(valid, "2379", "99999", 1):                           "there is no port 99999",
		strings.Replace(valid, "2379", "x", 1):                               "invalid port",
		strings.Replace(valid, "localhost", "", 1):                           "it has no host",
		strings.Replace(valid, "2379", "2379/v3", 1):                         "nothing may follow the port",
		strings.Replace(valid, "[\"", "[\n\"http://10.0.0.1:1\",\n\"ftp", 1): "cluster:6:1: ",
		valid + "tls {\nca_file = \"c\"\n}":                                  "tls has no effect",
	} {
		c, diags := ParseCluster(Source{Name: "cluster", Text: []byte("cluster {\n" + body + "\n}\n")}, Options{})
		if err := diags.Err(); c != nil || err == nil || !strings.Contains(err.Error(), want) ||
			strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %v, want %s", body, err, want)
		}
	}
	if c, diags := ParseCluster(Source{Name: "cluster", Text: nil}, Options{}); c != nil || diags.Err() == nil {
		t.Errorf("no block: %v", diags)
	}
}
