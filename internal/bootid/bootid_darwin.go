// Package bootid tells one boot of the machine from another.
package bootid

import "syscall"

// Read returns a text that is the same until the machine loses what it has not written to its
// disks: until it is booted again. It is empty if the system does not tell.
func Read() string {
	id, err := syscall.Sysctl("kern.bootsessionuuid")
	if err != nil {
		return ""
	}
	return id
}
