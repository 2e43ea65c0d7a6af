package csi

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// unreadable is the error of an answer that has come and cannot be read. gRPC reports it with a code that a plugin can send
// too: RESOURCE_EXHAUSTED for a message over the size limit, INTERNAL for one that cannot be decoded. Neither the code nor
// the text tells the two sources apart, so readAnswer does it by what was seen of the answer.
type unreadable struct{ why string }

func (e *unreadable) Error() string { return e.why }

// GRPCStatus returns the status UNKNOWN. codeName has a name of its own for the error.
func (e *unreadable) GRPCStatus() *status.Status { return status.New(codes.Unknown, e.why) }

// isUnreadable says whether err is of an answer that cannot be read.
func isUnreadable(err error) bool {
	_, is := errors.AsType[*unreadable](err)
	return is
}

// answer is where a message is decoded to, with the error of that.
type answer struct {
	into proto.Message
	err  error
}

// readAnswer makes one call. Its error is an *unreadable if the plugin's answer could not be read.
func readAnswer(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	into, is := reply.(proto.Message)
	if !is {
		return status.Errorf(codes.Internal, "%T is no message", reply)
	}
	l, held := ctx.Value(letterKey{}).(*letter)
	if !held {
		ctx, l = posted(ctx)
	}
	a := &answer{into: into}
	err := invoke(ctx, method, req, a, cc, opts...)
	switch {
	case err == nil:
		return nil
	case a.err != nil: // the decoder has run, so the plugin sent a message and not just a status
		return &unreadable{fmt.Sprintf("the plugin's answer cannot be read: %v", a.err)}
	case status.Code(err) == codes.ResourceExhausted && l.left.Load() && !l.answered.Load():
		// A RESOURCE_EXHAUSTED of the plugin's own comes in the trailer of its answer, which was not seen. gRPC refuses a
		// large message by the length at its start. Its trailer cannot have come by then, because the plugin may send
		// only window bytes before any of them are read.
		return &unreadable{fmt.Sprintf("the plugin's answer is larger than %d MiB, and was not read", maxAnswer>>20)}
	}
	return err
}
