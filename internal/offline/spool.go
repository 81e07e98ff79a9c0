package offline

import (
	"bufio"
	"errors"
	"io"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// spool is a file of lines that are read again. A nil spool has none, and keeps none.
type spool struct {
	fs   vfs.FS
	path string
	file vfs.File
	out  *bufio.Writer
}

func newSpool(fsys vfs.FS, path string) (*spool, error) {
	f, err := fsys.Create(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		return nil, err
	}
	return &spool{fsys, path, f, bufio.NewWriterSize(f, 1<<18)}, nil
}

func (s *spool) add(text []byte) error {
	if s == nil {
		return nil
	}
	_, err := s.out.Write(text)
	return err
}

// each visits the lines.
func (s *spool) each(visit func(text []byte) error) (err error) {
	if s == nil {
		return nil
	}
	if err := s.out.Flush(); err != nil {
		return err
	}
	f, err := s.fs.Open(s.path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	for r := newReader(f); ; {
		text, err := r.read()
		if errors.Is(err, io.ErrUnexpectedEOF) && len(r.buf) == 0 {
			return nil
		}
		if err == nil {
			err = visit(text)
		}
		if err != nil {
			return err
		}
	}
}

func (s *spool) remove() error {
	if s == nil {
		return nil
	}
	return errors.Join(s.file.Close(), s.fs.Remove(s.path))
}
