package peer

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
)

// Frames follow the header of a connection of calls:
//
//	length u32, of what follows | number u64 | type u8 | code u8 | body
//
// A call's number is chosen by its caller and grows from one request of a connection to the next.
// Integers are big-endian.
const (
	frameRequest byte = 1 + iota // code is the kind of the call
	frameReply                   // answers the request of that number
	frameFail                    // answers too; code and body make a RemoteError
	frameCancel                  // the caller has given up
	framePing                    // is answered by framePong, number zero
	framePong
)

const (
	frameHead = 4 + frameRest
	frameRest = 8 + 1 + 1 // bytes after length, without the body

	// MaxBody is the maximum length of a call's or a reply's body, in bytes.
	MaxBody = 320 << 20

	// trusted is the number of bytes of a body that are allocated when a frame announces them; more
	// is allocated as the bytes arrive.
	trusted = 64 << 10
)

type frame struct {
	number uint64
	typ    byte
	code   byte
	body   []byte // owned by the receiver
}

func appendFrame(b []byte, typ, code byte, number uint64, body []byte) []byte {
	b = slices.Grow(b, frameHead+len(body))
	b = binary.BigEndian.AppendUint32(b, uint32(frameRest+len(body)))
	b = binary.BigEndian.AppendUint64(b, number)
	b = append(b, typ, code)
	return append(b, body...)
}

// readFrame reads one frame. The error is io.EOF if r ends between two frames, wraps errProtocol if
// the bytes are no frame, and is otherwise one of r, or of admit. admit is called before a body
// larger than trusted is read; nil: all are admitted.
func readFrame(r *bufio.Reader, admit func(length int) error) (frame, error) {
	head, err := r.Peek(frameHead)
	if err != nil {
		if errors.Is(err, io.EOF) && len(head) > 0 {
			err = io.ErrUnexpectedEOF
		}
		return frame{}, err
	}
	length := int64(binary.BigEndian.Uint32(head)) - frameRest
	f := frame{number: binary.BigEndian.Uint64(head[4:]), typ: head[12], code: head[13]}
	bodiless := f.typ >= frameCancel && f.typ <= framePong
	switch {
	case f.typ < frameRequest || f.typ > framePong:
		return frame{}, fmt.Errorf("%w: frame of type %d", errProtocol, f.typ)
	case length < 0 || length > MaxBody || bodiless && length > 0:
		return frame{}, fmt.Errorf("%w: frame of type %d with a body of %d bytes", errProtocol, f.typ, length)
	}
	if admit != nil && length > trusted {
		if err := admit(int(length)); err != nil {
			return frame{}, err
		}
	}
	_, _ = r.Discard(frameHead)
	f.body, err = readBody(r, int(length))
	return f, err
}

// readBody reads length bytes. It allocates at most trusted bytes, or about twice the bytes that
// have arrived.
func readBody(r io.Reader, length int) ([]byte, error) {
	if length == 0 {
		return nil, nil
	}
	body := make([]byte, min(length, trusted))
	for from := 0; ; {
		if _, err := io.ReadFull(r, body[from:]); err != nil {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
		from = len(body)
		if from == length {
			return body, nil
		}
		more := make([]byte, min(length, 2*from))
		copy(more, body)
		body = more
	}
}
