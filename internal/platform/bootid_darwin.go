package platform

import "syscall"

// BootID returns a text that is the same until the machine loses what it has not written to its
// disks: until it is booted again. It is empty if the system does not tell.
func BootID() string {
	id, err := syscall.Sysctl("kern.bootsessionuuid")
	if err != nil {
		return ""
	}
	return id
}
