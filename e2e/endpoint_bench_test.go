package e2e

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/emptypb"

	"holdfast/internal/csifake"
)

// proxyVariable makes this test program a proxy: it holds the sockets to listen on and to call.
const proxyVariable = "HOLDFAST_E2E_PROXY"

// BenchmarkEndpoint measures a unary call straight at a plugin, over two bare proxies in two processes, and over the
// CSI endpoint, whose host and shim are two processes too. The proxies have the transports of host and shim: unix
// sockets, and mutual TLS between the two processes. As the shim, the second proxy has a program file and a session of
// its own. If it shared the pages of this program, gRPC's code would be in the processor's caches at its turn, and only
// then. If it shared the session, the kernel's autogroups would let it run sooner than the shim on a machine that is
// busy.
//
// The plugin's own time is 0 or 5 ms. The figures are medians, and ratios of them: of the endpoint to the proxies at
// 0 ms, and to the direct call at 5 ms.
func BenchmarkEndpoint(b *testing.B) {
	e := newEnv(b, allCaps...)
	plugin := e.addPlugin("alloc-p", csifake.Monolith)
	over, stop := e.serveCSI()
	socket := plugin.Socket()
	slow := func(ctx context.Context, conn *grpc.ClientConn) error {
		_, err := csi.NewNodeClient(conn).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
		return err
	}
	fast := func(ctx context.Context, conn *grpc.ClientConn) error {
		_, err := csi.NewNodeClient(conn).NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
		return err
	}
	plugin.On("NodeGetInfo").Delay(5 * time.Millisecond)
	direct, bare := dialCSI(b, socket), dialCSI(b, bareProxies(b, e.dir, socket))
	conns := []*grpc.ClientConn{direct, bare, over}
	b.ReportMetric(0, "ns/op")
	var took [2][3][]time.Duration
	for b.Loop() { // in turn, so that all have the same disturbances
		for i, conn := range conns {
			for j, call := range []func(context.Context, *grpc.ClientConn) error{fast, slow} {
				begin := time.Now()
				if err := call(b.Context(), conn); err != nil {
					b.Fatal(err)
				}
				took[j][i] = append(took[j][i], time.Since(begin))
			}
		}
	}
	per := func(j, i int) float64 { // median in µs
		slices.Sort(took[j][i])
		return float64(took[j][i][len(took[j][i])/2].Nanoseconds()) / 1000
	}
	for i, name := range []string{"direct", "proxies", "endpoint"} {
		b.ReportMetric(per(0, i), name+"-us")
		b.ReportMetric(per(1, i), name+"-5ms-us")
	}
	b.ReportMetric(per(0, 2)/per(0, 1), "endpoint/proxies")
	b.ReportMetric(per(1, 2)/per(1, 0), "endpoint/direct-5ms")
	plugin.ClearScript()
	stop()
	e.stopPlugin(plugin)
}

func dialCSI(b *testing.B, socket string) *grpc.ClientConn {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = conn.Close() })
	return conn
}

// bareProxies starts a proxy in this process and one in a process of its own, and returns the socket of the first.
func bareProxies(b *testing.B, dir, plugin string) string {
	first, second := filepath.Join(dir, "first.sock"), filepath.Join(dir, "second.sock")
	secret, err := newCertificate()
	if err != nil {
		b.Fatal(err)
	}
	secure, err := mutualTLS(secret)
	if err != nil {
		b.Fatal(err)
	}
	program, err := os.ReadFile("/proc/self/exe")
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "proxy"), program, 0o700)
	}
	if err != nil {
		b.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(dir, "proxy"))
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %s", proxyVariable, second, plugin))
	cmd.Stdin = bytes.NewReader(secret)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setsid: true}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		b.Fatal(err)
	}
	server, l, err := proxy(first, second, insecure.NewCredentials(), secure)
	if err != nil {
		b.Fatal(err)
	}
	go func() { _ = server.Serve(l) }()
	b.Cleanup(server.Stop)
	return first
}

// proxyMain is the process of the second proxy. The value of proxyVariable has its sockets, and its standard input what
// newCertificate has returned.
func proxyMain(sockets string) int {
	var listen, to string
	_, err := fmt.Sscan(sockets, &listen, &to)
	if err != nil {
		return 1
	}
	secret, err := io.ReadAll(os.Stdin)
	if err != nil {
		return 1
	}
	secure, err := mutualTLS(secret)
	if err != nil {
		return 1
	}
	server, l, err := proxy(listen, to, secure, insecure.NewCredentials())
	if err != nil {
		return 1
	}
	fmt.Println("ready")
	_ = server.Serve(l)
	return 0
}

// newCertificate returns a certificate for localhost and its private key, as PEM.
func newCertificate() ([]byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"localhost"}, IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		NotBefore:   time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour)}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	return append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private})...), err
}

// mutualTLS returns credentials of a server or client whose peer has the same certificate, as go-plugin has them.
func mutualTLS(secret []byte) (credentials.TransportCredentials, error) {
	cert, err := tls.X509KeyPair(secret, secret)
	if err != nil {
		return nil, err
	}
	peers := x509.NewCertPool()
	peers.AppendCertsFromPEM(secret)
	return credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{cert}, RootCAs: peers, ClientCAs: peers,
		ClientAuth: tls.RequireAndVerifyClientCert, ServerName: "localhost"}), nil
}

// proxy returns a server that passes each call to another socket, and reads no message.
func proxy(listen, to string, served, dialled credentials.TransportCredentials) (*grpc.Server, net.Listener, error) {
	conn, err := grpc.NewClient("unix://"+to, grpc.WithTransportCredentials(dialled))
	if err != nil {
		return nil, nil, err
	}
	l, err := net.Listen("unix", listen)
	return grpc.NewServer(grpc.Creds(served), grpc.UnknownServiceHandler(func(_ any, client grpc.ServerStream) error {
		method, _ := grpc.MethodFromServerStream(client)
		var message emptypb.Empty
		if err := client.RecvMsg(&message); err != nil {
			return err
		}
		call, err := conn.NewStream(client.Context(), &grpc.StreamDesc{ServerStreams: true}, method)
		if err != nil {
			return err
		}
		if err := call.SendMsg(&message); err != nil {
			return err
		}
		if err := call.CloseSend(); err != nil {
			return err
		}
		for {
			var reply emptypb.Empty
			if err := call.RecvMsg(&reply); err == io.EOF {
				return nil
			} else if err != nil {
				return err
			}
			if err := client.SendMsg(&reply); err != nil {
				return err
			}
		}
	})), l, err
}
