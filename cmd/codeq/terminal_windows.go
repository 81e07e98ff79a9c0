package main

import (
	"os"

	"golang.org/x/sys/windows"
)

// enableEscapes switches on escape sequences of a terminal. undo restores its mode.
func enableEscapes(out *os.File) (undo func(), err error) {
	h := windows.Handle(out.Fd())
	var mode uint32
	if err := windows.GetConsoleMode(h, &mode); err != nil {
		return nil, err
	}
	if err := windows.SetConsoleMode(h, mode|windows.ENABLE_VIRTUAL_TERMINAL_PROCESSING); err != nil {
		return nil, err
	}
	return func() { _ = windows.SetConsoleMode(h, mode) }, nil // nothing else can be done
}
