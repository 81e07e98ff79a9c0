package peer

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"io"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFrameGolden(t *testing.T) {
	b := appendFrame(nil, frameRequest, 7, 0x102, []byte("ab"))
	require.Equal(t, "0000000c"+"0000000000000102"+"01"+"07"+"6162", hex.EncodeToString(b))
	for typ, want := range map[byte]byte{
		frameRequest: 1, frameReply: 2, frameFail: 3, frameCancel: 4, framePing: 5, framePong: 6,
	} {
		require.Equal(t, want, typ)
	}
}

func TestFrameCutShort(t *testing.T) {
	whole := appendFrame(nil, frameReply, 0, 1, make([]byte, 2*trusted))
	for _, length := range []int{1, frameHead - 1, frameHead, frameHead + 1, frameHead + trusted, len(whole) - 1} {
		_, err := readFrame(bufio.NewReader(bytes.NewReader(whole[:length])), nil)
		require.ErrorIs(t, err, io.ErrUnexpectedEOF, "%d bytes", length)
	}
	_, err := readFrame(bufio.NewReader(bytes.NewReader(nil)), nil)
	require.Equal(t, io.EOF, err)
}

// A length is not trusted before its bytes have arrived.
func TestLyingLengthTakesNoMemory(t *testing.T) {
	lie := appendFrame(nil, frameRequest, 0, 1, make([]byte, trusted))
	binary.BigEndian.PutUint32(lie, frameRest+MaxBody)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err := readFrame(bufio.NewReader(bytes.NewReader(lie)), nil)
	runtime.ReadMemStats(&after)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(1<<20))
}

func FuzzFrame(f *testing.F) {
	f.Add(appendFrame(nil, frameRequest, 7, 1, []byte("body")))
	f.Add(appendFrame(appendFrame(nil, framePing, 0, 0, nil), frameFail, 3, 1<<40, []byte("text")))
	f.Add([]byte{0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0})
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0})
	f.Add([]byte{0x14, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 0, 1, 2, 3})
	f.Fuzz(func(t *testing.T, data []byte) {
		r := bufio.NewReader(bytes.NewReader(data))
		var again []byte
		for {
			fr, err := readFrame(r, nil)
			if err != nil {
				break
			}
			again = appendFrame(again, fr.typ, fr.code, fr.number, fr.body)
		}
		require.Equal(t, string(data[:len(again)]), string(again))
	})
}
