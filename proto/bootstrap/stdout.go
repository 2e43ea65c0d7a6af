package bootstrap

import (
	"bufio"
	"encoding/base64"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// inherited holds the descriptors that a shim got from its host. It is zero in any other process.
type inherited struct {
	asShim    bool
	handshake *os.File // the original descriptor 1
	life      *os.File
	err       error
}

// inheritedFiles is set before any code of the shim runs, so output of that code cannot reach the handshake's pipe.
var inheritedFiles = inherit()

// inherit opens the inherited descriptors. It removes LifeFD from the environment, so a child of the shim that runs the
// same binary does not act as a shim.
func inherit() inherited {
	number := os.Getenv(LifeFD)
	if number == "" || os.Getenv(CookieKey) != CookieValue {
		return inherited{}
	}
	os.Unsetenv(LifeFD)
	in := inherited{asShim: true}
	in.life, in.err = openInherited(number)
	if in.err == nil {
		in.handshake, in.err = silenceStdout()
	}
	return in
}

func openInherited(number string) (*os.File, error) {
	fd, err := strconv.Atoi(number)
	if err != nil {
		return nil, err
	}
	unix.CloseOnExec(fd)
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil {
		return nil, os.NewSyscallError("life pipe", err)
	}
	return os.NewFile(uintptr(fd), "life"), nil
}

// silenceStdout redirects descriptor 1 to /dev/null and returns the original file.
func silenceStdout() (*os.File, error) {
	saved, err := unix.FcntlInt(1, unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, os.NewSyscallError("dup stdout", err)
	}
	null, err := unix.Open(os.DevNull, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("open "+os.DevNull, err)
	}
	defer unix.Close(null)
	if err := unix.Dup3(null, 1, 0); err != nil {
		return nil, os.NewSyscallError("redirect stdout", err)
	}
	return os.NewFile(uintptr(saved), "handshake"), nil
}

var handshakeLine = regexp.MustCompile(`^1\|[0-9]+\|unix\|[^|]+\|grpc\|`)

// certField is the index of the certificate in the handshake line. go-plugin leaves it empty, as TLS is ours.
const certField = 5

// forwardHandshake copies go-plugin's handshake line, with the shim's certificate (DER) if there is one, to the host.
// It drops all other lines, which may come before and after that line, and returns at end of file.
func forwardHandshake(from io.Reader, to io.WriteCloser, cert []byte) {
	lines := bufio.NewReader(from)
	for {
		line, err := lines.ReadString('\n')
		if handshakeLine.MatchString(line) {
			fields := strings.SplitAfter(line, "|")
			fields[certField] = base64.RawStdEncoding.EncodeToString(cert) + fields[certField]
			io.WriteString(to, strings.Join(fields, ""))
			to.Close()
			break
		}
		if err != nil {
			return
		}
	}
	io.Copy(io.Discard, lines)
}
