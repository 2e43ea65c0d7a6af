package config

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hashicorp/hcl/v2"
	"github.com/hashicorp/hcl/v2/hclsyntax"

	"holdfast/registry"
)

// Cluster is a cluster block: how a node shares volumes with other nodes.
type Cluster struct {
	ID        string   // of the cluster
	Expect    int      // no claim is granted before so many nodes have registered
	Endpoints []string // URLs of etcd
	// Paths of PEM files; empty: none. Certificate and key are read again for each connection.
	CAFile, CertFile, KeyFile string
	LeaseTTL                  time.Duration // after which a node that etcd does not hear from is suspect
	LostNodes                 string        // what happens to a suspect node: LostWait or LostFence
}

// The values of Cluster.LostNodes.
const (
	LostWait  = "wait"  // its claims stay until an operator declares it out of service
	LostFence = "fence" // it is fenced, and then its claims are released
)

var clusterStanza = &stanza{
	name: "cluster",
	doc: "A cluster block makes a node share its volumes with other nodes, through etcd. The agent reads it from its " +
		"configuration file; an orchestrator passes it to the SDK.",
	fields: []field{
		{name: "id", kind: isText, required: true,
			doc: "The ID of the cluster. Nodes with the same ID and etcd form a cluster."},
		{name: "expect", kind: isNumber, required: true, low: 1, high: 1000,
			doc: "The number of nodes that form the cluster. No claim is granted before so many have registered. It " +
				"cannot be changed."},
		{name: "endpoints", kind: isStrings, required: true, doc: "The URLs of etcd."},
		{name: "lease_ttl", kind: isDuration, low: int64(2 * time.Second), high: int64(10 * time.Minute),
			fallback: 10 * time.Second, doc: "A node that etcd has not heard from for so long is suspect. Its claims " +
				"stay."},
		{name: "lost_nodes", kind: isChoice, words: []string{LostWait, LostFence}, fallback: LostWait,
			doc: "With wait, the claims of a suspect node stay until it is back, or declared out of service. " +
				"With fence, Holdfast calls the orchestrator's fence function, and then releases them."},
		{name: "tls", kind: isBlock, block: tlsStanza,
			doc: "How the node verifies etcd, and proves its own identity to etcd."},
	},
}

var tlsStanza = &stanza{
	name: "tls",
	doc: "Files in PEM. cert_file and key_file are read again for each connection, so that they can be renewed; " +
		"ca_file is read when the shim starts.",
	fields: []field{
		{name: "ca_file", kind: isText,
			doc: "The authorities that etcd's certificate may come from. Without it, those of the machine."},
		{name: "cert_file", kind: isText, doc: "The certificate of this node."},
		{name: "key_file", kind: isText, doc: "Its private key."},
	},
}

func (f *file) cluster() *Cluster {
	top := f.fields(f.block, &stanza{name: "a cluster file"})
	b, found := top.one("cluster")
	if !found {
		f.errorf(f.head, "write cluster { ... }", "there is no cluster block")
		return nil
	}
	in := f.open(b, clusterStanza)
	c := &Cluster{
		ID:     parsed(in, "id", func(s string) (string, error) { return registry.ParseLabel("id", s) }),
		Expect: int(in.integer("expect")), LeaseTTL: in.duration("lease_ttl"),
		LostNodes: oneOf[string](in, "lost_nodes"),
		Endpoints: in.endpoints(),
	}
	if tls, ok := in.one("tls"); ok {
		files := f.open(tls, tlsStanza)
		c.CAFile, c.CertFile, c.KeyFile = files.text("ca_file"), files.text("cert_file"), files.text("key_file")
		if slices.ContainsFunc(c.Endpoints, func(url string) bool { return strings.HasPrefix(url, "http:") }) {
			f.errorf(tls.head, "write https:// in endpoints", "tls has no effect on endpoints with http://")
		}
		if (c.CertFile == "") != (c.KeyFile == "") {
			f.errorf(tls.head, "set both", "cert_file and key_file belong together")
		}
	}
	return c
}

// endpoints reads the URLs of etcd.
func (f *fields) endpoints() (urls []string) {
	f.declared("endpoints", isStrings)
	v, ok := f.value("endpoints")
	if !ok {
		return nil
	}
	urls, ok = stringsOf(v)
	if !ok || len(urls) == 0 {
		f.errorf(f.rangeOf("endpoints"), `give a list such as ["https://10.0.0.1:2379"]`, "endpoints cannot be %s",
			kindOf(v))
	}
	for i, s := range urls {
		if strings.Contains(s, "@") {
			f.errorf(f.itemRange("endpoints", i), "use tls",
				"an endpoint has a user or password; nodes authenticate with certificates")
		} else if err := checkEndpoint(s); err != nil {
			f.errorf(f.itemRange("endpoints", i), `write it as "https://10.0.0.1:2379"`,
				"%q is not the URL of an etcd server: %v", s, err)
		}
	}
	return urls
}

// itemRange returns the range of an element of the list, if it is a literal.
func (f *fields) itemRange(name string, i int) hcl.Range {
	if list, ok := f.body.Attributes[name].Expr.(*hclsyntax.TupleConsExpr); ok && i < len(list.Exprs) {
		return list.Exprs[i].Range()
	}
	return f.rangeOf(name)
}

func checkEndpoint(text string) error {
	u, err := url.Parse(text)
	if e, is := errors.AsType[*url.Error](err); is {
		return e.Err
	}
	port, err := strconv.ParseUint(u.Port(), 10, 16)
	switch {
	case u.Scheme != "http" && u.Scheme != "https":
		return errors.New("the scheme has to be https or http")
	case u.Hostname() == "":
		return errors.New("it has no host")
	case u.Port() == "":
		return errors.New("it has no port")
	case err != nil || port == 0:
		return fmt.Errorf("there is no port %s", u.Port())
	case strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "":
		return errors.New("nothing may follow the port")
	}
	return nil
}
